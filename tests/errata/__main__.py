"""`python -m errata`, with tests/ on the path: measures all errata and writes the figures into docs/errata.md."""

from errata.page import PAGE, overview, refreshed

if __name__ == "__main__":
    PAGE.write_text(refreshed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(overview())
