"""How the documentation is built: `make docs`.

Sphinx, for it is kept: MkDocs has had no release since August 2024, and Material for MkDocs and mkdocstrings
only take fixes until their successor is there. The pages are Markdown that reads well unbuilt too.
"""

import sys
from importlib.metadata import version as version_of
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "extensions"))

project = "noisescale"
author = "The noisescale authors"
copyright = author  # noqa: A001  Sphinx's name for it
version = release = version_of("noisescale")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "reference", "docstrings"]
exclude_patterns = ["extensions", "_static"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
myst_url_schemes = ("http", "https", "mailto")

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
napoleon_use_ivar = True
napoleon_use_rtype = False
default_role = "code"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = "noisescale"
html_static_path = ["_static"]
html_css_files = ["noisescale.css"]
html_js_files = ["copy.js"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1d4ed8", "color-brand-content": "#1d4ed8"},
    "dark_css_variables": {"color-brand-primary": "#93b4ff", "color-brand-content": "#93b4ff"},
}
