"""Tables of a page that tests write, a cell at a time, so that a part of the tests can be run."""

from support.cluster import ROOT

PAGE = ROOT / "docs/models.md"


def write_cell(writer, rows, columns, row, column, text):
    """Write a cell of the table of a test module; all other cells stay. Rows and columns give the order."""
    begin = f"<!-- written by {writer} -->"
    end = "<!-- end -->"
    before, _, rest = PAGE.read_text().partition(begin)
    known, _, after = rest.partition(end)
    lines = ([cell.strip() for cell in line.split("|")[1:-1]] for line in known.splitlines() if line.startswith("|"))
    cells = {line[0]: dict(zip(columns, line[1:], strict=True)) for line in lines}
    cells.setdefault(row, {})[column] = text
    body = ([name, *(cells[name].get(each, "-") for each in columns)] for name in rows if name in cells)
    table = ["| " + " | ".join(line) + " |" for line in (["architecture", *columns], *body)]
    table.insert(1, "|---" * (len(columns) + 1) + "|")
    PAGE.write_text("\n".join([before + begin, "", *table, "", end + after]))
