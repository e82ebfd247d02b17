DELETE FROM resource_control.installed_migration WHERE version = '20000101000002';
DROP FUNCTION resource_control.lock_throttled_resource(resource_control.throttled_resource_enum, text);
DROP TABLE resource_control.throttled_resource;
DROP TYPE resource_control.throttled_resource_enum;
DROP TABLE resource_control.throttle;
DROP FUNCTION resource_control.elapsed(interval);
