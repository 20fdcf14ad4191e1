"""What is shown of a Timeline: explanations, comparisons, pages, traces for other viewers."""
