-- Removes an attempt and its fence, so that the rollout id can be used again.
-- 1  incarnation of the attempt that is meant
-- Reply    OK (it is gone), 1 if it held an entry, a mark or an intent, else 0 |
--          CHANGED (there is another attempt by now; nothing changed)
-- Repeat   safe: OK
local state, err = load_state()
if err then return err end
if state and state.incarnation ~= arg(1) then return reply('CHANGED', state) end
if not state then return reply('OK', nil, 0) end
remove()
return reply('OK', nil, holds(state))
