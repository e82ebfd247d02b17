DELETE FROM resource_control.installed_migration WHERE version = '20000101000002';
DROP FUNCTION resource_control.lock_throttled_resource(resource_control.throttled_resource_enum, text);
DROP FUNCTION resource_control.attempt_throttled_resource(resource_control.throttled_resource_enum, text);
DROP FUNCTION resource_control.require_read_committed();
DROP FUNCTION resource_control.elapsed(interval);
DROP FUNCTION resource_control.elapsed_with_days(interval);
DROP TABLE resource_control.throttled_resource;
DROP TYPE resource_control.throttled_resource_enum;
