"""flashgen behind the interfaces of others: torch, flash_attn, xformers, transformers, diffusers,
vLLM and SGLang. Their public names are those of flashgen.runtime.
"""
