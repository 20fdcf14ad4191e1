"""Open a model without reading its weights: files, formats, configuration, adapters."""
