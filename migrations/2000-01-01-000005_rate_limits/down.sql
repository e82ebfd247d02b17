DELETE FROM resource_control.installed_migration WHERE version = '20000101000005';
DROP FUNCTION resource_control.rate_limit_full_at(timestamptz, float8, float8);
DROP TABLE resource_control.rate_limit;
