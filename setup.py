"""The part of the metadata that depends on where the project is published.

`.github/workflows/release.yml` sets `REPOSITORY_URL`. Without it there are no URLs, and the README's links
stay relative.
"""

import os
import re
from pathlib import Path

from setuptools import setup

URL = os.environ.get("REPOSITORY_URL", "").rstrip("/")
README = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
PLACES = {
    "Source": "",
    "Documentation": "/blob/main/docs/getting-started.md",
    "Changelog": "/blob/main/CHANGELOG.md",
    "Issues": "/issues",
}


def absolute(text: str) -> str:
    """The README, with links that lead to the repository from anywhere."""
    images = re.sub(r"(!\[[^]]*\]\()(?!http)", rf"\g<1>{URL}/raw/main/", text)
    return re.sub(r"((?<!!)\[[^]]*\]\()(?!http|#)", rf"\g<1>{URL}/blob/main/", images)


setup(
    long_description=absolute(README) if URL else README,
    long_description_content_type="text/markdown",
    project_urls={name: URL + place for name, place in PLACES.items()} if URL else {},
)
