"""Settings of Sphinx for ``make docs``.

The source folder is the project's, not docs/: so every relative link between documents, to configs
and to pictures is the same on the site as on the host of the code.
"""

import re
from pathlib import Path

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.addnodes import pending_xref
from sphinx.transforms.post_transforms import SphinxPostTransform

ROOT = Path(__file__).parents[1]

project = 'aft_mm'
copyright = 'the aft_mm contributors'
release = re.search("__version__ = '(.+)'", (ROOT / 'aft_mm/__init__.py').read_text()).group(1)

root_doc = 'docs/index'
include_patterns = ['docs/**', 'configs/*/README.md', 'examples/*/README.md', '*.md']
exclude_patterns = ['README.md', 'docs/_build']
extensions = ['sphinx.ext.autodoc', 'sphinx.ext.napoleon', 'sphinx.ext.viewcode', 'myst_nb']
myst_enable_extensions = ['dollarmath']
myst_fence_as_directive = ['math']
myst_heading_anchors = 4
# The notebook is run by the tests; here it is shown as it stands.
nb_execution_mode = 'off'

autodoc_member_order = 'bysource'
autodoc_typehints = 'both'
autodoc_typehints_description_target = 'documented'
autodoc_preserve_defaults = True
autodoc_class_signature = 'mixed'
autodoc_default_options = {'members': True, 'imported-members': True, 'show-inheritance': True}
napoleon_use_rtype = False

html_theme = 'furo'
html_static_path = ['_static']
html_css_files = ['site.css']
html_title = f'aft_mm {release}'
html_extra_path = ['_root']  # the first page, which sends to that of docs/
html_copy_source = False
html_show_sphinx = False


def draw_inline(self, node: nodes.math) -> None:
    """A formula in a line, as MathML, which a browser draws without a script from elsewhere."""
    self.body.append(convert(node.astext()))
    raise nodes.SkipNode


def draw_block(self, node: nodes.math_block) -> None:
    """A formula of its own."""
    self.body.append(convert(node.astext(), display='block'))
    raise nodes.SkipNode


class FolderLinks(SphinxPostTransform):
    """Links to folders, which a host of code shows: to their index, or without one just the text."""

    default_priority = 5  # before MyST looks for a document

    def run(self, **kwargs) -> None:
        for node in list(self.document.findall(pending_xref)):
            if node.get('reftype') == 'myst':
                page = Path(self.env.doc2path(node['refdoc']))
                folder = (page.parent / node['reftarget']).resolve()
                if not folder.is_dir():
                    continue
                index = (folder.relative_to(ROOT) / 'index').as_posix()
                if index in self.env.found_docs:
                    address = self.app.builder.get_relative_uri(node['refdoc'], index)
                    link = nodes.reference('', '', *node.children, refuri=address, internal=True)
                    node.replace_self(link)
                else:
                    node.replace_self(node.children)


def leave_out(app, what, name, thing, skip, options) -> bool | None:
    """The fields of a NamedTuple, of which Python says no more than their number."""
    return True if (getattr(thing, '__doc__', None) or '').startswith('Alias for field') else None


def setup(app) -> None:
    """Register the additions of this file to Sphinx."""
    app.add_post_transform(FolderLinks)
    app.connect('autodoc-skip-member', leave_out)
    app.add_html_math_renderer('mathml', (draw_inline, None), (draw_block, None))
