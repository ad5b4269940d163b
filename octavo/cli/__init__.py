"""The command line: `octavo run | chat | serve | bench | explain`. A command's file is imported when it is asked for.
May import config, errors, platform and logging at once, everything else only inside the functions that need it.
Used by people; nothing imports it."""
