"""The one error a user is meant to read."""


class UserError(ValueError):
    """Something the user can put right.

    The message is one line: the rule, the value received, what to do. Commands print it and exit non-zero, without a
    traceback.
    """
