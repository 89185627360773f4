"""One engine over HTTP: what SGLang and vLLM are asked, and what of their replies is believed."""
