"""Words that are a token each."""

from tokenizers import Tokenizer


def one_token_words(model):
    """Return the words by token that are one token whatever stands beside them, so that a text keeps its tokens."""
    tokens = Tokenizer.from_file(str(model / "tokenizer.json"))
    texts = {token: tokens.decode([token]) for token in range(tokens.get_vocab_size())}
    return {
        token: text
        for token, text in texts.items()
        if text[:1] == " " and text[1:].isalpha() and tokens.encode(text, add_special_tokens=False).ids == [token]
    }
