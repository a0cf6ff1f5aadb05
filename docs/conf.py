"""Sphinx's configuration of the documentation site: `make docs`."""

project = "xlatrain"
author = "the authors of xlatrain"
copyright = author

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "xlatrain"
myst_heading_anchors = 4
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_typehints = "signature"
napoleon_use_ivar = True  # attributes of a docstring are not described a second time
autodoc_member_order = "bysource"
suppress_warnings = [
    "ref.python",  # a public name that several modules offer
    "autodoc",  # lightning's docs are reStructuredText in docstrings of users' base classes
    "docutils",  # docstrings are written for readers of the code, with single backquotes and indented lists
    "misc.highlighting_failure",  # output of commands shown as it is
]
