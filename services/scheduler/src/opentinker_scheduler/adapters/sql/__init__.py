"""The SQL adapter: tables, migrations, repositories, and the one thread that runs them."""
