"""The console script, and `python -m octavo`. The command line is imported where Ctrl-C is caught."""

import sys


def main() -> int:
    """Run the command line and return the exit code."""
    try:
        from octavo.cli.main import main as run_command_line

        return run_command_line()
    except KeyboardInterrupt:  # during these imports
        print(file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
