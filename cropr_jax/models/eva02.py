"""EVA-02: what it changes of the plain ViT.

Gated MLPs, rotary embeddings beside the learned position table, no bias on keys, and the mean of
the patches into the head. CLS is there but does not enter the mean.

Source: Fang et al., "EVA-02: A Visual Representation for Neon Genesis"; baaivision/EVA:
EVA-02/asuka/modeling_finetune.py.
"""

from typing import Any

from cropr_jax.models.vit import ViTSpec

# Ti and S have no norm in their MLPs.
VARIANTS = {
    "ti": ViTSpec(192, 12, 3, 14, "swiglu"),
    "s": ViTSpec(384, 12, 6, 14, "swiglu"),
    "b": ViTSpec(768, 12, 12, 14, "swiglu_norm"),
    "l": ViTSpec(1024, 24, 16, 14, "swiglu_norm"),
}

# Attributes of `cropr_jax.models.anatomy.Anatomy` unless a config says otherwise.
DEFAULTS: dict[str, Any] = {
    "patch": 14,
    "mlp": "swiglu_norm",
    "mlp_ratio": 8 / 3,
    "use_key_bias": False,
    # All EVA-02 were pretrained on 224 pixels in patches of 14.
    "rope_reference": 16,
    "pool": "mean_patches",
}
