"""The coordinator's HTTP side: a page for people, JSON for programs, the ledger's static files, metrics.

Read-only and public: whatever is shown here, anybody may know. Nothing of it decides anything, and
nothing that a stranger sends to it reaches further than the stranger's own connection.
"""
