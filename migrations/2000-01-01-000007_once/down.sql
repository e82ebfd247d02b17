DELETE FROM resource_control.installed_migration WHERE version = '20000101000007';
DROP FUNCTION resource_control.once_outcome(text, text);
DROP TABLE resource_control.once;
