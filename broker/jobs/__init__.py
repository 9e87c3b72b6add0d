"""Jobs on a broker's files: the audit. Nothing here is imported by the broker."""
