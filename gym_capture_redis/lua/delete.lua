-- Removes an attempt and its fence, so that the rollout id can be used again.
-- KEYS[1]  rollout
-- ARGV[1]  incarnation of the attempt that is meant
-- Reply    OK (it is gone) | CHANGED (there is another attempt by now; nothing changed)
-- Repeat   safe: OK
local state, err = load_state()
if err then return err end
if state and state.incarnation ~= ARGV[1] then return reply('CHANGED', state) end
if state then redis.call('UNLINK', key) end
return reply('OK', nil)
