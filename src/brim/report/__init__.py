"""Views of a Timeline: explanations, comparisons, pages, traces for other viewers."""
