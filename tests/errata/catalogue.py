"""All errata, in the order of the page."""

from errata import (  # noqa: F401  each fills the registry
    measure_attention,
    measure_loss_and_embedding,
    measure_masks,
    measure_norm_lora_network,
    measure_note_on_qk,
    measure_note_with_listings,
)
from errata.registry import ERRATA

CATALOGUE = sorted(ERRATA.values(), key=lambda erratum: int(erratum.id[1:]))
