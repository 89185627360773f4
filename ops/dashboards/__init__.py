"""The four dashboards, written by `python -m ops.dashboards`; never by hand."""
