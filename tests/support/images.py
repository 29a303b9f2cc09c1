"""Tiny models that see, LLaVA's and BLIP-2's (each a tower before a Llama), and questions with images."""

import base64
import io
import random

from support.architectures import COMMON, HEADS, Architecture, make
from support.questions import Question, Shape

SIDE, PATCH = 56, 14  # pixels: 16 patches, each of which takes the place of a token
IMAGE, IMAGE_TOKEN = "<|pad|>", 3  # the tokenizer has no other that is not needed
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|message|>{{ message['role'] }}\n"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}" + IMAGE + "{% else %}{{ part['text'] }}"
    "{% endif %}{% endfor %}<|end|>{% endfor %}<|message|>assistant\n"
)
LLAVA = Architecture(
    "llava",
    "LLaVA (images, CLIP before Llama)",
    {
        "text_config": {"model_type": "llama", "num_hidden_layers": 3, "head_dim": 32} | COMMON | HEADS,
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": SIDE,
            "patch_size": PATCH,
            "projection_dim": 64,
        },
        "image_token_index": IMAGE_TOKEN,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
    },
    kind="AutoModelForImageTextToText",
)

QUERIES = 16  # tokens of an image, which come before the prompt
TOWER = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
ONE_MORE = {"vocab_size": COMMON["vocab_size"] + 1}  # BLIP-2's processor adds a token to its tokenizer
# vLLM takes one image in a prompt of it. It needs no torchvision, unlike LLaVA.
BLIP2 = Architecture(
    "blip-2",
    "BLIP-2 (images, Q-Former before Llama)",
    {
        "text_config": COMMON
        | HEADS
        | ONE_MORE
        | {"model_type": "llama", "num_hidden_layers": 3, "head_dim": 32, "architectures": ["LlamaForCausalLM"]},
        "vision_config": TOWER | {"image_size": SIDE, "patch_size": PATCH},
        "qformer_config": TOWER | {"vocab_size": 8},
        "num_query_tokens": QUERIES,
        "image_token_index": COMMON["vocab_size"],
    },
    kind="AutoModelForImageTextToText",
)


def make_llava(directory):
    """Write the model with its processor, and return its directory."""
    import transformers
    from safetensors.torch import load_file, save_file

    weights = make(LLAVA, directory) / "model.safetensors"
    # As real checkpoints name them, and vLLM; transformers 5 writes another name.
    renamed = {name.replace("tower.", "tower.vision_model."): each for name, each in load_file(weights).items()}
    save_file(renamed, weights, metadata={"format": "pt"})
    size = {"height": SIDE, "width": SIDE}
    images = transformers.CLIPImageProcessor(size=size, crop_size=size)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    processor = transformers.LlavaProcessor(
        images, tokenizer, PATCH, "default", chat_template=TEMPLATE, image_token=IMAGE, num_additional_image_tokens=1
    )
    processor.save_pretrained(directory)
    return directory


def make_blip2(directory):
    """Write the model with its processor, and return its directory."""
    import transformers

    make(BLIP2, directory)
    images = transformers.BlipImageProcessorPil(size={"height": SIDE, "width": SIDE})
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    processor = transformers.Blip2Processor(images, tokenizer, QUERIES)
    processor.save_pretrained(directory)
    return directory


def seen(text, *seeds, stream=False):
    """Return a question with a text and images of random pixels."""
    parts = [{"type": "image_url", "image_url": {"url": _data_url(seed)}} for seed in seeds]
    return Question(Shape.CHAT, (*parts, {"type": "text", "text": text}), stream)


def _data_url(seed):
    from PIL import Image

    file = io.BytesIO()
    Image.frombytes("RGB", (SIDE, SIDE), random.Random(seed).randbytes(3 * SIDE * SIDE)).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
