DROP FUNCTION resource_control.lock_key(text);
DROP FUNCTION resource_control.next_token(regclass);
DROP FUNCTION resource_control.token_floor();
DROP TABLE resource_control.token_base;
DROP SEQUENCE resource_control.fencing_token;
DROP TABLE resource_control.installed_migration;
DROP SCHEMA resource_control;
