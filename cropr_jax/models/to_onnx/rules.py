"""What each primitive of a vision transformer at inference is in ONNX, in a few lines each.

A new primitive is one rule, a line in the table of its kind. Source of the operators: onnx/onnx:
docs/Operators.md.
"""

from cropr_jax.models.to_onnx import elementwise, indexing, products, reductions, shapes
from cropr_jax.models.to_onnx.step import Rule

# By the name of the primitive.
RULES: dict[str, Rule] = (
    elementwise.RULES | shapes.RULES | reductions.RULES | indexing.RULES | products.RULES
)
