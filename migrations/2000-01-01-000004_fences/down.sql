DELETE FROM resource_control.installed_migration WHERE version = '20000101000004';
DROP FUNCTION resource_control.pass_fence(text, bigint);
DROP TABLE resource_control.fence;
