"""What all tests of the router share."""

import pytest

from support.certificates import Authority


@pytest.fixture(scope="session", autouse=True)
def one_authority(tmp_path_factory):
    """The system's authorities, of which there is one: to read the usual ones takes longer than most tests."""
    folder = tmp_path_factory.mktemp("authorities")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", Authority(folder, "nobody").own.cert)
        patch.setenv("SSL_CERT_DIR", str(folder))
        yield
