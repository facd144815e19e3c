"""Configure Sphinx for the documentation site, which `run/site` builds.

The source folder is the checkout, so links between pages work both on the site and in the
repository. `../ARCHITECTURE.md` is a page, and links to files that are not pages become downloads.
"""

import sys
from pathlib import Path

import mpidl

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS / "extensions"))

project = "mpidl"
author = copyright = "The mpidl developers"
version = release = mpidl.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "numpydoc",
    "myst_parser",
    "api_pages",
    "example_sources",
    "notebook_pages",
    "page_lists",
    "side_by_side",
]
root_doc = "docs/index"
source_suffix = {".md": "markdown", ".ipynb": "notebook"}
include_patterns = ["docs/**", "README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"]
include_patterns += ["CODE_OF_CONDUCT.md", "GOVERNANCE.md", "ROADMAP.md", "SECURITY.md"]
include_patterns += ["kernels/README.md", "mpidl/*/README.md", "tests/README.md"]
# Folders without pages.
exclude_patterns = [".*", "benchmarks", "build", "dist", "environments", "examples", "run", "runs"]
exclude_patterns += ["tests/*/**"]
nitpicky = False  # types in docstrings are free text, such as "array (n, C, H, W)"

myst_enable_extensions = ["colon_fence", "deflist", "attrs_inline"]
myst_heading_anchors = 4
myst_links_external_new_tab = True
default_role = "code"  # the role of `name` in a docstring
highlight_language = "text"  # for blocks without a language

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings contain the types, with shapes and units
numpydoc_show_class_members = False
numpydoc_xref_param_type = False

html_theme = "pydata_sphinx_theme"
html_title = "mpidl"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_extra_path = ["extra"]
html_copy_source = False
html_show_sourcelink = False
html_favicon = "static/logo.svg"
WIDE_PAGES = ("index", "tutorial", "gallery", "matlab", "comparison")
html_sidebars = {f"docs/{page}": [] for page in WIDE_PAGES}
html_theme_options = {
    "logo": {"text": "mpidl", "image_light": "static/logo.svg", "image_dark": "static/logo.svg"},
    "navbar_align": "left",
    "navbar_end": ["theme-switcher"],
    "header_links_before_dropdown": 7,
    "show_prev_next": True,
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "pygments_light_style": "tango",
    "pygments_dark_style": "monokai",
    "footer_start": ["copyright"],
    "footer_end": [],
}
