"""From a path and options to a `Session`: the only place where the parts are put together."""
