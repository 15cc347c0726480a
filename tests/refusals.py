"""One sentence for every mistake."""

import pytest

from tfrl.cli.errors import UserError


def refusal(call, *arguments) -> str:
    """The sentence of the UserError that `call` raises."""
    with pytest.raises(UserError) as caught:
        call(*arguments)
    assert caught.value.exit_code == 2
    sentence = str(caught.value)
    assert sentence.endswith(".") and "\n" not in sentence and len(sentence) < 300
    return sentence
