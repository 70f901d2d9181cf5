"""Pages for a browser: one file each, of the templates in `templates/`, with everything they show inside.

Values are escaped, and each page's content security policy allows what it embeds and nothing else to run or to load, so
that not even a caption that slipped through the escaping could do anything.
"""

from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from ttv_train.storage.partial import write_text


def write_page(path: Path, template: str, **values: object) -> Path:
    """Renders a template of that name to `path` and returns it."""
    environment = Environment(
        loader=PackageLoader("ttv_train"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return write_text(path, environment.get_template(template).render(values))
