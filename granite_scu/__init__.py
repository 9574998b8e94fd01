"""Fine-tune IBM Granite with LoRA while a feedback controller sets the regularisation strength."""

import logging
import os

# Here, before any other import, because tokenizers and torch read them once, when they are imported themselves.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name, which the newer one would outdo
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

# bitsandbytes warns at import that an optional hub kernel is absent; peft imports it even where it is not used.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
