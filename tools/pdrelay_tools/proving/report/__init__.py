"""The report of a run: as HTML with plots, as Markdown, as JSON."""
