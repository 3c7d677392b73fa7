"""The softmax worklog, docs/worklog.md: its rungs, and what measures them and writes its tables and figures."""
