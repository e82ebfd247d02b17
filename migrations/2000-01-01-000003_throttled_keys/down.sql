DELETE FROM resource_control.installed_migration WHERE version = '20000101000003';
DROP FUNCTION resource_control.prune_throttled_keys(integer);
DROP FUNCTION resource_control.attempt_throttled_key(resource_control.throttled_resource_enum, text, text);
DROP FUNCTION resource_control.throttled_key_lock(resource_control.throttled_resource_enum, text);
DROP TABLE resource_control.throttled_key;
