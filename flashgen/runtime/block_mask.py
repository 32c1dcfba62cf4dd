"""Block masks for attention(block_mask=...), made once and used by many calls.

document(document_ids, causal=True), prefix_lm(prefix_lengths, seq_q, seq_k) and from_boolean(mask)
each give one.
"""

from flashgen.reference.block_masks import document, from_boolean, prefix_lm
from flashgen.spec.block_mask import BlockMask

__all__ = ["BlockMask", "document", "from_boolean", "prefix_lm"]
