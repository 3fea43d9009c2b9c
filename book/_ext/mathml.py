"""Render mathematics as MathML, which browsers show without scripts, fonts or requests.

A formula that cannot be converted is a Sphinx warning, and so fails the build.
"""

from __future__ import annotations

from typing import Any

from docutils import nodes
from math_core import LatexError, LatexToMathML
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.math import get_node_equation_number
from sphinx.writers.html5 import HTML5Translator

logger = logging.getLogger(__name__)
converter = LatexToMathML(fancy_error=False)


def to_mathml(node: nodes.Element, display: bool) -> str:
    latex = node.astext()
    if display and r"\\" in latex and r"\begin" not in latex:
        latex = rf"\begin{{aligned}}{latex}\end{{aligned}}"
    try:
        return str(converter.convert_with_local_state(latex, displaystyle=display))
    except LatexError as error:
        logger.warning("cannot convert the formula %r: %s", latex, error, location=node)
        return ""


def visit_inline(self: HTML5Translator, node: nodes.math) -> None:
    self.body.append(to_mathml(node, display=False))
    raise nodes.SkipNode


def visit_display(self: HTML5Translator, node: nodes.math_block) -> None:
    self.body.append(self.starttag(node, "div", CLASS="math"))
    if node["number"]:
        self.body.append(f'<span class="eqno">({get_node_equation_number(self, node)})')
        self.add_permalink_ref(node, "Link to this equation")
        self.body.append("</span>")
    self.body.append(to_mathml(node, display=True) + "</div>\n")
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_display, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
