"""The command line: `octavo run | chat | serve | bench | explain`. The file of a command is imported when it runs.
May import config, errors, platform and logging at once, everything else only inside the functions that need it.
Used by people; nothing imports it."""
