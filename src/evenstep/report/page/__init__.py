"""The report as one HTML file that opens without a network: plots by plotly.js, and the table behind each.

`plotly-basic.min.js` is the file of that name in the package `plotly.js-basic-dist-min` of npm.
"""

from evenstep.report.page.html import page_html

__all__ = ["page_html"]
