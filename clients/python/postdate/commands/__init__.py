"""The subcommands of `postdate`."""
