DELETE FROM resource_control.installed_migration WHERE version = '20000101000006';
DROP TABLE resource_control.schedule;
