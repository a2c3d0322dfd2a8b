"""The sheets that `onfoot table` prints."""

from __future__ import annotations

from onfoot.cli.console import Sheet
from onfoot.config import GPT2Config
from onfoot.tables import (
    ACTIVATION_TEXTS,
    Formula,
    LoraRow,
    Row,
    counts,
    formulas,
    lora_rows,
    lora_total,
    norm_backward,
    table_1,
    table_2,
    table_3,
)


def sheets(config: GPT2Config, lora_r: int) -> dict[str, list[Sheet]]:
    """The sheets of each table of the paper; Table 2 includes the parameter counts, Table 3 LoRA."""
    return {
        "1": [_sheet_1(config)],
        "2": [_sheet_2(config), _sheet_counts(config)],
        "3": [_sheet_3(config), _sheet_lora(config, lora_rows(config, lora_r))],
    }


def _equations(formula: Formula) -> str:
    return ", ".join(formula.equations)


def _number(n: int) -> str:
    return f"{n:,}" if n else ""


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2f} %"


def _step(row: Row) -> tuple[str, ...]:
    ids = [", ".join(f.equations) for f in (row.forward, row.backward)]
    return row.layer, row.forward.text, ids[0], row.shape, row.backward.text, ids[1], _number(row.parameters)


STEP_COLUMNS = ["layer", "forward ↓", "eq", ">shape", "backward ↑", "eq", ">parameters"]


def _stacked(sheet: Sheet) -> Sheet:
    """The sheet for a narrow terminal: each backward formula below its forward formula."""
    out = Sheet(sheet.title, ["layer", "formula", "eq", ">shape", ">parameters"])
    for i, (layer, forward, forward_eq, shape, backward, backward_eq, parameters) in enumerate(sheet.rows):
        if i in sheet.emphasised:
            out.emphasised.add(len(out.rows))
        out.rows.append((layer, f"↓ {forward}" if forward else "", forward_eq, shape, parameters))
        if backward:
            out.rows.append(("▌" if layer.startswith("▌") else "", f"↑ {backward}", backward_eq, "", ""))
        if i in sheet.section_ends:
            out.section_ends.add(len(out.rows) - 1)
    return out


def _sheet_1(config: GPT2Config) -> Sheet:
    rows = table_1(config)
    per_head = sum(row.parameters for row in rows)
    heads = config.n_head
    sheet = Sheet(
        f"Table 1 · one head of self-attention: d = {config.n_embd}, d_ρ = {config.key_width}, "
        f"d_h = {config.value_width}",
        STEP_COLUMNS,
        [
            *(_step(row) for row in rows),
            ("one head", "", "", "", "", "", f"{per_head:,}"),
            (f"{heads} heads", "", "", "", "", "", f"{heads * per_head:,}"),
        ],
        [
            "Δ_v, Δ_q and Δ_k are summed at a_2. Δ_raw flows to q and k, Δ_3^h to ρ and v.",
            "Rows of ρ sum to 1, rows of Δ_causal to 0." + (" Both are lower triangular." if config.causal else ""),
        ],
        section_ends={len(rows) - 1},
        emphasised={len(rows), len(rows) + 1},
    )
    sheet.narrow = _stacked(sheet)
    return sheet


def _sheet_2(config: GPT2Config) -> Sheet:
    rows = table_2(config)
    total = counts(config)
    sheet = Sheet(f"Table 2 · the network, {_blocks(config.n_layer)}", STEP_COLUMNS)
    for i, row in enumerate(rows):
        cells = _step(row)
        if row.in_block:
            cells = (f"▌ {cells[0]}", *cells[1:])
        if row.layer == "FC logits" and config.tie_word_embeddings:
            cells = (*cells[:-1], "shared")
        sheet.rows.append(cells)
        last_of_part = i + 1 == len(rows) or rows[i + 1].in_block != row.in_block
        if last_of_part:
            sheet.section_ends.add(len(sheet.rows) - 1)
    for text, n in (
        ("▌ one block", total.block),
        (f"▌ {_blocks(config.n_layer)}", total.n_blocks * total.block),
        ("the network", total.total),
    ):
        sheet.emphasised.add(len(sheet.rows))
        sheet.rows.append((text, "", "", "", "", "", f"{n:,}"))
    sheet.notes = [
        "▌ marks the rows of a block. Blocks are stacked: a_10 of a block is a_1 of the next, and Δ_1 is Δ_10 of the "
        "previous one.",
        f"g is {ACTIVATION_TEXTS[config.activation_function][0]}. Δ_5 flows to a_1 and a_4, Δ_10 to a_5 and a_9.",
        f"{norm_backward('i', 'Δ')}   (eq 40)",
        "n is the divisor of the loss: the number of targets (n_T − 1) for the mean, 1 for the sum. "
        "Rows of Δ_12 without a target are 0.",
    ]
    if config.tie_word_embeddings:
        sheet.notes.append("Tied: the logits use the token embedding, w_11 = w_tokᵗ, and have no bias.")
    sheet.narrow = _stacked(sheet)
    return sheet


def _sheet_counts(config: GPT2Config) -> Sheet:
    c = counts(config)
    logits = [row.count for row in table_3(config) if row.layer == "FC logits"] or [c.logits]
    sheet = Sheet(
        "Parameter counts",
        ["variant or part", ">parameters", "note"],
        [
            ("untied, with a logits bias", f"{c.untied_with_bias:,}", ""),
            ("untied", f"{c.untied:,}", ""),
            ("tied", f"{c.tied:,}", f"{_percent(c.saved_by_tying)} fewer than untied with a bias"),
            (
                "FC logits",
                f"{sum(logits):,}",
                "token embedding, shared" if config.tie_word_embeddings else " + ".join(f"{n:,}" for n in logits),
            ),
            (
                "b_k (no effect on the loss)",
                f"{c.dead:,}",
                f"{c.n_blocks} × {c.dead_per_block:,}",
            ),
        ],
    )
    current = 2 if config.tie_word_embeddings else 0 if config.lm_head_bias else 1
    variant, n, note = sheet.rows[current]
    sheet.rows[current] = (f"{variant}  ← this one", n, note)
    sheet.emphasised = {current}
    sheet.section_ends = {2}
    return sheet


def _sheet_3(config: GPT2Config) -> Sheet:
    rows = table_3(config)
    sheet = Sheet(
        "Table 3 · the gradient of every parameter; the backward pass runs from bottom to top",
        ["layer", "", ">shape", ">parameters", "gradient of the loss", "eq", "tensor"],
    )
    for i, row in enumerate(rows):
        first = i == 0 or rows[i - 1].layer != row.layer
        shape = " × ".join(str(n) for n in row.shape)
        if row.copies > 1:
            shape = f"{row.copies} × ({shape})"
        layer = f"▌ {row.layer if first else ''}".rstrip() if row.in_block else row.layer if first else ""
        tensor = f"h.*.{row.name}" if row.in_block else row.name.removeprefix("transformer.")
        sheet.rows.append(
            (layer, row.symbol, shape, f"{row.count:,}", row.gradient.text, _equations(row.gradient), tensor)
        )
    c = counts(config)
    sheet.section_ends = {len(rows) - 1}
    sheet.emphasised = {len(rows)}
    sheet.rows.append(("all", "", "", f"{c.total:,}", f"rows marked ▌ count {c.n_blocks} ×", "", ""))
    sheet.notes = [
        f"Gradients are summed over the batch. Shapes are in × out; {config.n_head} × ( ) means one per head."
    ]
    if config.tie_word_embeddings:
        sheet.notes.append("Tied: the token embedding is used twice, and its gradient is the sum of both paths.")
    columns = (0, 2, 3, 4, 5)  # without the symbol, which is in the gradient's formula, and the tensor
    sheet.narrow = Sheet(sheet.title, [sheet.columns[i] for i in columns])
    sheet.narrow.rows = [tuple(row[i] for i in columns) for row in sheet.rows]
    sheet.narrow.section_ends, sheet.narrow.emphasised = sheet.section_ends, sheet.emphasised
    return sheet


def _sheet_lora(config: GPT2Config, rows: list[LoraRow]) -> Sheet:
    f, r = formulas(config), rows[0].r
    block, total = lora_total(rows)
    sheet = Sheet(
        f"LoRA · a LoRA layer of rank r = {r} on every linear layer",
        ["layer", ">in → out", ">d: in × r", ">u: r × out", ">parameters", ">of the frozen layer"],
    )
    for row in rows:
        layer = row.layer if row.layer == "FC logits" else f"▌ {row.layer}"
        ratio = _percent(row.count / row.frozen)
        sizes = f"{row.n_in} → {row.n_out}"
        sheet.rows.append((layer, sizes, f"{row.down:,}", f"{row.up:,}", f"{row.count:,}", ratio))
    n = counts(config)
    sheet.section_ends = {len(rows) - 2, len(rows) - 1}
    sheet.emphasised = {len(rows), len(rows) + 1}
    sheet.rows += [
        ("▌ one block", "", "", "", f"{block:,}", _percent(block / n.block)),
        ("on every layer", "", "", "", f"{total:,}", _percent(total / n.total)),
    ]
    sheet.notes = [
        f"{n.n_blocks} × {block:,} + {rows[-1].count:,} = {total:,}: {_percent(1 - total / n.total)} fewer than the "
        f"{n.total:,} of the network. The LoRA layer of the logits is counted once, not once per block.",
        *(
            f"{formula.text}   (eq {_equations(formula)})"
            for formula in (f["LoRA a_12"], f["LoRA Δ_11"], f["∂d_11"], f["∂u_11"])
        ),
        "The error signal flows through both the frozen layer and its LoRA layer.",
    ]
    return sheet


def _blocks(n: int) -> str:
    return f"{n} block" + ("s" if n != 1 else "")
