"""Whether a script was called wrongly: options, a configuration or a module that it can't start with.

Such a call fails again in the same way, so it is not started again. What libraries print was captured from argparse
(Python 3.11), click 8.5, rich-click 1.9, typer 0.29, fire 0.7, absl 2.5, hydra 1.3.8, jsonargparse 4.53, tyro 1.0,
cyclopts 5.4, docopt 0.6, plumbum 2.0, draccus 0.11 and omegaconf 2.4.
"""

from __future__ import annotations

import re

_EXIT_USAGE = 2
"""What all of them end with, but absl, hydra and docopt."""
_TYPES = frozenset({"SyntaxError", "IndentationError", "TabError", "ImportError", "ModuleNotFoundError"})
_RAISED = re.compile(
    r"(?:argparse\.Argument|getopt\.Getopt)Error\Z|click\.exceptions\.(?:UsageError|Bad|Missing|No)"
    r"|absl\.(?:app\.UsageError|flags\._exceptions\.(?:CantOpen|Illegal|Unrecognized|Validation))"
    r"|hydra\.errors\.(?:OverrideParse|ConfigComposition|SearchPath|MissingConfig)Exception\Z"
    r"|draccus\.utils\.(?:Decoding|Parsing)Error\Z|omegaconf\.errors\."
)
"""The same raised: with HYDRA_FULL_ERROR=1, click's ``standalone_mode=False``, argparse's ``exit_on_error=False``."""
_SAID = re.compile(
    r"^usage: .*^\S.*: error: |can't open file '|: No module named \S+\s*\Z|^error: unrecognized arguments"
    r"|can't find '__main__' module|^(?:\S+: )?[Ee]rror: (?:No such (?:option|command)|Missing (?:option|argument)"
    r"|Invalid value for |Got unexpected extra argument|unrecognized arguments|the following arguments are required"
    r"|argument \S+: )|^FATAL Flags parsing error:",
    re.MULTILINE | re.DOTALL,
)
_USAGE = re.compile(
    r"^\s*usage:(?:\s+[^\s\d]|\Z)|[╭┌+][─-]+ (?:[\w ]+ )?(?:error|options) [─-]+|\S --help\b", re.I | re.M
)
"""A usage text, or a box of typer, tyro or cyclopts. With their exit code nothing more is needed."""
_USAGE_OF_SCRIPT = re.compile(r"^\s*usage:\s+(?:python\S*\s+(?:-\w\s+)*)?\S+\.py\b", re.IGNORECASE | re.MULTILINE)
_ERROR = re.compile(r"^error: ", re.IGNORECASE | re.MULTILINE)
"""With another exit code the text must be the script's own, and say nothing of another error."""
_HYDRA = re.compile(r"^Set the environment variable HYDRA_FULL_ERROR=1 ", re.MULTILINE)
_HYDRA_RAN = re.compile(r"^Error executing job with overrides: |^Traceback \(most recent", re.MULTILINE)
"""hydra ends with 1: without this line the configuration could not be put together, and no job began."""


def is_wrong_call(exception_type: str, exitcode: int, said: str) -> bool:
    """Judge the end of a script that has reported no step.

    Args:
        exception_type: What ended it, with its module as Python prints it; empty for none.
        exitcode: Of the process.
        said: What it said last.
    """
    name = exception_type.rsplit(".", 1)[-1]
    if name in _TYPES or _RAISED.match(exception_type):
        return True
    if name not in ("", "SystemExit", "DocoptExit") or exitcode not in (1, _EXIT_USAGE):
        return False
    if _SAID.search(said) or (_USAGE_OF_SCRIPT.search(said) and not _ERROR.search(said)):
        return True
    if exitcode == _EXIT_USAGE and _USAGE.search(said):
        return True
    return bool(_HYDRA.search(said)) and not _HYDRA_RAN.search(said)
