"""The report as one HTML file that opens without a network: plots by plotly.js, and the table behind each."""

from evenstep.report.page.html import page_html

__all__ = ["page_html"]
