"""The one exception that means "the user can mend this"."""


class UserError(ValueError):
    """A mistake in a config, a dataset or a command line.

    The message is one line that names the offending value, the file or config key it came from, and the mend.
    The CLI prints it without a traceback and exits with code 2.
    """
