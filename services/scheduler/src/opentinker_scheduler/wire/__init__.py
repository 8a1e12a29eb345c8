"""Between messages and the domain: the only modules that know both."""
