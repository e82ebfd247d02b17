DELETE FROM resource_control.installed_migration WHERE version = '20000101000003';
DROP FUNCTION resource_control.prune_service_requests(interval, integer);
DROP FUNCTION resource_control.renew_service_request(text, bigint, interval, bigint);
DROP FUNCTION resource_control.complete_service_request(text, bigint, boolean, bigint);
DROP FUNCTION resource_control.claim_service_request(text, integer, interval, text, bigint);
DROP TABLE resource_control.service_request;
DROP DOMAIN resource_control.service_name;
DROP DOMAIN resource_control.slot_number;
DROP DOMAIN resource_control.request_expiry;
