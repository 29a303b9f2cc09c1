"""Classes as people write them, and who may name which."""

import pytest

from pdrelay_proxy.core.admission.service_classes import MOST_CLASSES, OnMiss, ServiceClass, ServiceClasses
from pdrelay_proxy.errors import BadRequest, ClassNotAllowed, ConfigError

TEXTS = ("gold:ttft=0.5,on_miss=refuse", "silver:ttft=5,rank=1", "batch:rank=9,open=true")


def classes(*texts, default="silver"):
    return ServiceClasses.of(texts or TEXTS, default)


def test_all_keys_of_a_class():
    """Times are seconds."""
    text = "gold-1:ttft=0.5,itl=5e-2,on_miss=refuse,max_wait=2,rank=3,open=true"

    assert ServiceClass.parse(text) == ServiceClass("gold-1", 3, 0.5, 0.05, OnMiss.REFUSE, 2.0, is_open=True)
    assert ServiceClass.parse("batch") == ServiceClass("batch")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "'' is not the name of a class: write at most 32 lower-case letters, digits, '-' and '_'"),
        ("Gold:ttft=1", "'Gold' is not the name of a class"),
        (f"{'a' * 33}:ttft=1", r"'a{33}' is not the name of a class"),
        ("gold:", "'gold:' is not a class: write NAME:ttft=SECONDS,on_miss=queue"),
        ("gold:ttft", "'gold:ttft' is not a class: write NAME"),
        ("gold:ttft=1,ttft=2", "the class 'gold' has a key twice"),
        ("gold:tttf=1", "the class gold has 'tttf', which is not a key of a class: did you mean ttft?"),
        ("gold:xyzzy=1", "the class gold has 'xyzzy', which is not a key of a class: write ttft, itl, .* or open"),
        ("gold:ttft=0", "the class gold has ttft '0': write a number of seconds above 0, at most 86400"),
        ("gold:ttft=nan", "the class gold has ttft 'nan': write a number"),
        ("gold:ttft=-1", "the class gold has ttft '-1': write a number"),
        ("gold:itl=fast", "the class gold has itl 'fast': write a number"),
        ("gold:max_wait=1e9", "the class gold has max_wait '1e9': write a number"),
        ("gold:rank=100", "the class gold has the rank '100': write a whole number from 0 to 99"),
        ("gold:rank=-1", "the class gold has the rank '-1': write a whole number"),
        ("gold:on_miss=drop", "the class gold has on_miss 'drop': write queue, refuse or serve"),
        ("gold:open=yes", "the class gold has open 'yes': write true or false"),
        ("gold:ttft=" + "1" * 500, r"the class gold has ttft '1{40}\.\.\.': write a number"),
    ],
)
def test_a_wrong_class_is_one_sentence(text, says):
    """It names the class, the key and the value, and says what would be right."""
    with pytest.raises(ValueError, match=f"^{says}"):
        ServiceClass.parse(text)


@pytest.mark.parametrize(
    ("texts", "default", "says"),
    [
        (("gold:ttft=x",), "gold", "classes: the class gold has ttft 'x'"),
        (("gold", "gold:ttft=1"), "gold", "classes: gold is there twice: write each class once"),
        ((), "gold", "default_class is 'gold', and there are no classes: write classes, too"),
        (("gold", "batch"), None, "there are classes, and default_class is missing, .*: write gold or batch"),
        (("gold", "batch"), "silver", "default_class is 'silver', which is not a class: write gold or batch"),
        ([f"c{one}" for one in range(MOST_CLASSES + 1)], "c0", "classes: there are 17, and 16 is the most"),
    ],
)
def test_classes_that_do_not_fit(texts, default, says):
    """Found at start, and when the settings are read again."""
    with pytest.raises(ConfigError, match=f"^{says}"):
        ServiceClasses.of(texts, default)


def test_without_classes_there_is_nothing():
    """So nothing is asked of a request."""
    assert ServiceClasses.of((), None) is None


@pytest.mark.parametrize(
    ("granted", "asked", "name"),
    [
        ((), [], "silver"),
        ((), [b"batch"], "batch"),
        ((), [b" silver\t"], "silver"),
        (("gold",), [], "gold"),
        (("batch", "gold"), [], "batch"),
        (("batch", "gold"), [b"gold"], "gold"),
        (("gold",), [b"batch"], "batch"),
    ],
)
def test_the_class_of_a_request(granted, asked, name):
    """The one that it names, if its key may, or else the key's own, or else the default."""
    assert classes().of_request(granted, asked).name == name


@pytest.mark.parametrize(
    ("granted", "asked", "says"),
    [
        ((), b"gold", "this client may not use the class gold: it may use silver or batch"),
        (("batch",), b"gold", "this client may not use the class gold: it may use batch"),
        (("batch",), b"silver", "this client may not use the class silver: it may use batch"),
        ((), b"nothing", "this client may not use the class nothing: it may use silver or batch"),
        ((), b"", "this client may not use the class of its X-Request-Class: it may use silver or batch"),
        ((), b"gold\r\nx: y", "this client may not use the class of its X-Request-Class: it may use"),
        ((), b"\xff" * 10_000, "this client may not use the class of its X-Request-Class: it may use"),
        ((), b"GOLD", "this client may not use the class of its X-Request-Class: it may use"),
    ],
)
def test_nobody_promotes_themselves(granted, asked, says):
    """A class that there is, and one that there is not, are refused in the same words; nothing odd is repeated."""
    with pytest.raises(ClassNotAllowed, match=f"^{says}") as caught:
        classes().of_request(granted, [asked])

    assert len(str(caught.value)) < 200


def test_two_headers_are_none():
    """Or a proxy in front and this router could read different ones."""
    with pytest.raises(BadRequest, match="X-Request-Class is there 2 times: send one"):
        classes().of_request((), [b"batch", b"silver"])


def test_keys_name_classes_that_there_are():
    """A class that was renamed is found at once."""
    with pytest.raises(ConfigError, match=r"keys\.txt gives alice the class bronze, which is not a class: write gold,"):
        classes().check_granted({"alice": ("gold", "bronze")}, "keys.txt")
