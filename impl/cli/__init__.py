"""The subcommands of ``python -m impl``: modules with ``HELP``, ``add_arguments(parser)`` and ``run(args) -> int``."""
