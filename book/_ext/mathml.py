"""Render mathematics as MathML, which browsers show without scripts, fonts or requests.

A formula that cannot be converted is a Sphinx warning, and so fails the build.
"""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from math_core import LatexError, LatexToMathML
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.math import get_node_equation_number
from sphinx.writers.html5 import HTML5Translator

logger = logging.getLogger(__name__)
converter = LatexToMathML(fancy_error=False)
# The font's primes are raised already, and browsers leave no room for the slant of the letter.
PRIMES = re.compile("(<mo>[′-‴⁗]</mo>)(?=</msup>|</msubsup>)")
PLACED = r'<mrow><mspace width="0.12em"/><mpadded voffset="-0.25em">\1</mpadded></mrow>'
# A sign at the start of an aligned column goes on with a sum: it needs room on both sides.
CONTINUED = re.compile('(</mtd><mtd style="text-align: left;[^>]*>)<mo>([+−])</mo>')


def to_mathml(node: nodes.Element, display: bool) -> str:
    latex = node.astext()
    if display and r"\\" in latex and r"\begin" not in latex:
        latex = rf"\begin{{aligned}}{latex}\end{{aligned}}"
    try:
        mathml = str(converter.convert_with_local_state(latex, displaystyle=display))
        return CONTINUED.sub(r'\1<mo form="infix">\2</mo>', PRIMES.sub(PLACED, mathml))
    except LatexError as error:
        logger.warning("cannot convert the formula %r: %s", latex, error, location=node)
        return ""


def keep_punctuation(app: Sphinx, doctree: nodes.document, _: str) -> None:
    """Put a formula and the punctuation after it into one span: browsers would break between."""
    for formula in list(doctree.findall(nodes.math)):
        text = formula.next_node(descend=False, siblings=True)
        if isinstance(text, nodes.Text) and (found := re.match(r"[),.:;?\]]+", text)):
            text.parent.replace(text, nodes.Text(text[found.end() :]))
            span = nodes.inline(classes=["unbroken"])
            formula.parent.replace(formula, span)
            span += [formula, nodes.Text(found[0])]


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
    app.connect("doctree-resolved", keep_punctuation)
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_display, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
