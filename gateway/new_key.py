"""`python -m gateway.new_key`: mint an API key and print it once, with the line that the key file holds of it."""

import secrets
import sys

from gateway.tenants import hash_key


def main() -> int:
    """Print a fresh key and its hash."""
    key = f"tk-{secrets.token_urlsafe(32)}"
    sys.stdout.write(f'key:  {key}\nfile: keys = ["{hash_key(key)}"]\n')
    return 0


if __name__ == "__main__":
    sys.exit(main())
