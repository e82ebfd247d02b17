DROP FUNCTION resource_control.lock_key(text);
DROP SEQUENCE resource_control.fencing_token;
DROP TABLE resource_control.installed_migration;
DROP SCHEMA resource_control;
